"""`diloco host provision`: checks a fleet's file and writes the variables of infra/terraform."""
