"""Objects in buckets: s3://, gs:// and az://, over obstore"""
