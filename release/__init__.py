"""What makes and checks a release: man pages, completion files, the wheel, a zipapp."""
