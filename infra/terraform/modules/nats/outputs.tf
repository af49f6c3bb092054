output "instances" {
  description = "The machines, by server."
  value       = google_compute_instance.this
}

output "disks" {
  description = "The disks of the streams, by server."
  value       = google_compute_disk.streams
}

output "snapshots" {
  description = "When disks are copied, by region."
  value       = google_compute_resource_policy.snapshots
}

output "copied" {
  description = "The disks that are copied, by server."
  value       = google_compute_disk_resource_policy_attachment.snapshots
}

output "configurations" {
  description = "Configuration of each server."
  value       = google_storage_bucket_object.configuration
}

output "service_accounts" {
  description = "Whom the machines are to Google Cloud, by server."
  value       = { for name, account in google_service_account.this : name => account.name }
}

output "bindings" {
  description = "Their rights on buckets."
  value       = google_storage_bucket_iam_member.configuration
}

output "secrets" {
  description = "Their keys as the state holds them."
  value       = { for name, key in module.key : name => key.stored }
}

output "logs" {
  description = "The right to write logs."
  value       = google_project_iam_member.logs
}
