output "hosts" {
  description = "Machines of each slice."
  value       = local.hosts
}

output "bulk" {
  description = "Whether its machines come all at once, and nobody but the keeper makes them anew."
  value       = local.bulk
}

output "templates" {
  description = "What the machines of each slice are made from."
  value       = google_compute_instance_template.this
}

output "groups" {
  description = "The group of machines of each slice."
  value       = google_compute_instance_group_manager.this
}

output "workload_policies" {
  description = "Topology of each slice of several hosts."
  value       = flatten(google_compute_resource_policy.slice[*].workload_policy)
}

output "names" {
  description = "The names of the hosts of several slices, by DNS, and who may change them."
  value = {
    zone    = one(google_dns_managed_zone.peers[*])
    records = google_dns_record_set.peer
    change  = one(google_dns_managed_zone_iam_member.peers[*])
  }
}

output "slice_firewall" {
  description = "Who reaches the hosts of a learner; null for one host."
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
