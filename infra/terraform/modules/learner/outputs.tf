output "hosts" {
  description = "Machines of the slice."
  value       = local.hosts
}

output "service_account" {
  description = "Whom its machines are to Google Cloud."
  value       = google_service_account.this.name
}

output "bindings" {
  description = "Its rights on buckets."
  value = [
    google_storage_bucket_iam_member.create, google_storage_bucket_iam_member.read,
    google_storage_bucket_iam_member.tidy, google_storage_bucket_iam_member.configuration,
  ]
}

output "template" {
  description = "What its machines are made from."
  value       = google_compute_instance_template.this
}

output "group" {
  description = "The group of its machines."
  value       = google_compute_instance_group_manager.this
}

output "workload_policy" {
  description = "Topology of a slice of several hosts."
  value       = one(google_compute_resource_policy.slice[*].workload_policy)
}

output "slice_firewall" {
  description = "Who reaches the hosts of a slice; null for a slice of one host."
  value       = one(google_compute_firewall.slice[*])
}

output "secret" {
  description = "Its credentials as the state holds them."
  value       = module.credentials.stored
}

output "health_check" {
  description = "What its machine is asked; null for a slice of several hosts."
  value       = one(google_compute_health_check.this[*])
}

output "logs" {
  description = "The right to write logs."
  value       = google_project_iam_member.logs
}
