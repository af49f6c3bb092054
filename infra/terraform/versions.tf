terraform {
  # Write-only arguments, which keep secrets out of the state, came with 1.11.
  required_version = ">= 1.11"

  required_providers {
    google = {
      source  = "hashicorp/google"
      version = ">= 7.39, < 8"
    }
  }
}

provider "google" {
  project = var.project
}

provider "google" {
  alias                 = "billing"
  project               = var.project
  billing_project       = var.project
  user_project_override = true
}
