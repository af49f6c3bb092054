"""A learner's network traffic, which runs while the learner trains.

It uploads updates and checkpoints, downloads versions, and claims shares of the data.
"""
