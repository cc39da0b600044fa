"""The commands, a file each: it parses, calls the library and prints."""
