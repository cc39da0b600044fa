"""What an error message means, by rules; and which rank hangs, by dumps of torch's flight recorder"""
