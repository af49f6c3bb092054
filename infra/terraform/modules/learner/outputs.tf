output "hosts" {
  description = "Machines of the slice."
  value       = local.hosts
}

output "bulk" {
  description = "Whether its machines come all at once, and nobody but the keeper makes them anew."
  value       = local.bulk
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
