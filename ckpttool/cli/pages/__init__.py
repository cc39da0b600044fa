"""What the commands print: the pages of inspect and of diff."""
