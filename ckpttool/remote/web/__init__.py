"""What speaks HTTP: https:// and http://, by ranges, over urllib3"""
