"""Models merged by more than a mean: SLERP, task arithmetic, TIES and DARE."""
