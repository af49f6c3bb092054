"""A learner's arrays: parameters, views, codes, inner optimizer, and how they lie on devices."""
