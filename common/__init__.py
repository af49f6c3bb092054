"""The code that learner and aggregator share: wire format, names, codecs, store and bus."""
