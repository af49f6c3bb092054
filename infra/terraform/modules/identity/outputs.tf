output "account" {
  description = "The account; who is given it waits for its rights."
  value = {
    name   = google_service_account.this.name
    email  = google_service_account.this.email
    member = google_service_account.this.member
  }
  depends_on = [
    google_storage_bucket_iam_member.create, google_storage_bucket_iam_member.read,
    google_storage_bucket_iam_member.configuration,
  ]
}

output "bindings" {
  description = "Its rights on buckets."
  value = [
    google_storage_bucket_iam_member.create, google_storage_bucket_iam_member.read,
    google_storage_bucket_iam_member.tidy, google_storage_bucket_iam_member.configuration,
  ]
}

output "data" {
  description = "The right to read the run's data, if it has some."
  value       = google_storage_bucket_iam_member.data
}

output "logs" {
  description = "The right to write logs."
  value       = google_project_iam_member.logs
}
