output "service_account" {
  description = "Whom its machine is to Google Cloud."
  value       = google_service_account.this.name
}

output "bindings" {
  description = "Its rights on buckets."
  value = [
    google_storage_bucket_iam_member.create, google_storage_bucket_iam_member.read,
    google_storage_bucket_iam_member.collect, google_storage_bucket_iam_member.configuration,
  ]
}

output "instance" {
  description = "Its machine."
  value       = google_compute_instance.this
}

output "secret" {
  description = "Its credentials as the state holds them."
  value       = module.credentials.stored
}

output "logs" {
  description = "The right to write logs."
  value       = google_project_iam_member.logs
}
