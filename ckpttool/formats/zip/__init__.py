"""The zip container: read strictly, inflated, written."""
