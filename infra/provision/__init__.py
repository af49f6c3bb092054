"""`diloco host provision`: a fleet on Google Cloud, read and checked before Terraform sees it."""
