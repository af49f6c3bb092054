"""`diloco host provision`: reads and checks a fleet on Google Cloud before Terraform sees it."""
