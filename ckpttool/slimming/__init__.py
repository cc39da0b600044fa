"""Room in the folder of a run, and files without what nobody loads"""
