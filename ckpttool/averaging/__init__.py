"""Several models in one: the mean, SLERP, task arithmetic, TIES and DARE"""
