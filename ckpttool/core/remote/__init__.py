"""The same bytes elsewhere: objects of https, the hub, S3, Google, Azure; read by ranges, written whole"""
