"""Keys renamed: prefixes stripped and added, regular expressions"""
