output "service_account" {
  description = "Whom its machine is to Google Cloud."
  value       = google_service_account.this.name
}

output "read" {
  description = "What it may read of the run's objects."
  value       = google_storage_bucket_iam_member.read
}

output "instance" {
  description = "Its machine."
  value       = google_compute_instance.this
}

output "nginx" {
  description = "What nginx is told."
  value       = google_storage_bucket_object.nginx
}

output "logs" {
  description = "The right to write logs."
  value       = google_project_iam_member.logs
}
