"""What the learner and the aggregator both speak: wire format, names, codecs, store and bus."""
