output "version" {
  description = "Where machines read it."
  value       = "projects/${var.project}/secrets/${google_secret_manager_secret.this.secret_id}/versions/latest"
  depends_on  = [google_secret_manager_secret_version.this, google_secret_manager_secret_iam_member.reader]
}

output "reader" {
  description = "Who may read it."
  value       = google_secret_manager_secret_iam_member.reader
}

output "stored" {
  description = "The version as the state holds it."
  value       = google_secret_manager_secret_version.this
}
