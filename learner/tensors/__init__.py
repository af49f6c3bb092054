"""The arrays of a learner, and their sharding over its devices.

They are the parameters, the views (the parameters of a version, equal for all learners), the codes
(quantized updates and version deltas), and the inner optimizer's state.
"""
