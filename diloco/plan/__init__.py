"""`diloco plan`: forecasts the training of a fleet."""
