"""The user's model: built by a factory, loaded strictly, diagnosed where a checkpoint does not fit"""
