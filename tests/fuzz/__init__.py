"""Changed files of every format: read as other libraries read them or refused, in bounded memory and time."""
