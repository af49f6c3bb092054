output "id" {
  description = "The network."
  value       = google_compute_network.this.id
}

output "subnetworks" {
  description = "Subnet by region; what needs the internet to boot waits for the region's NAT."
  value       = { for region, subnet in google_compute_subnetwork.this : region => subnet.self_link }
  depends_on  = [google_compute_router_nat.this]
}

output "subnets" {
  description = "Subnets by region."
  value       = google_compute_subnetwork.this
}

output "ways_out" {
  description = "The ways out to the internet, by region."
  value       = google_compute_router_nat.this
}

output "firewalls" {
  description = "The rules that let somebody in."
  value = concat(
    [
      google_compute_firewall.clients, google_compute_firewall.routes, google_compute_firewall.ssh,
      google_compute_firewall.health,
    ],
    google_compute_firewall.metrics[*], google_compute_firewall.caches[*],
  )
}
