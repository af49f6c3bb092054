output "service_account" {
  description = "Whom its machine is to Google Cloud."
  value       = google_service_account.this.name
}

output "role" {
  description = "What it may do."
  value       = google_project_iam_custom_role.this
}

output "binding" {
  description = "To which groups and machines."
  value       = google_project_iam_member.groups
}

output "instance" {
  description = "Its machine."
  value       = google_compute_instance.this
}

output "reads" {
  description = "Whose objects it may read: the run's, and those that configure machines."
  value       = [google_storage_bucket_iam_member.read, google_storage_bucket_iam_member.configuration]
}

output "logs" {
  description = "The right to write logs."
  value       = google_project_iam_member.logs
}
