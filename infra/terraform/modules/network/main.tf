# One network of its own, a subnet for each region. No machine has an address on the internet: what
# they fetch goes out by Cloud NAT, Google's services are reached inside, people come in by IAP.

locals {
  # Google's own addresses, of tunnels by IAP and of health checks.
  iap_ranges   = ["35.235.240.0/20"]
  probe_ranges = ["35.191.0.0/16", "130.211.0.0/22"]
}

resource "google_compute_network" "this" {
  name                            = var.name
  auto_create_subnetworks         = false
  routing_mode                    = "GLOBAL"
  delete_default_routes_on_create = false
}

resource "google_compute_subnetwork" "this" {
  #checkov:skip=CKV_GCP_76:The subnets have no IPv6 addresses, and so no use for Google's services over IPv6.
  for_each                 = var.subnets
  name                     = "${var.name}-${each.key}"
  region                   = each.key
  network                  = google_compute_network.this.id
  ip_cidr_range            = each.value
  private_ip_google_access = true

  log_config {
    aggregation_interval = "INTERVAL_5_MIN"
    flow_sampling        = 0.1
    metadata             = "INCLUDE_ALL_METADATA"
  }
}

resource "google_compute_router" "this" {
  for_each = var.subnets
  name     = "${var.name}-${each.key}"
  region   = each.key
  network  = google_compute_network.this.id
}

resource "google_compute_router_nat" "this" {
  for_each                           = var.subnets
  name                               = "${var.name}-${each.key}"
  region                             = each.key
  router                             = google_compute_router.this[each.key].name
  nat_ip_allocate_option             = "AUTO_ONLY"
  source_subnetwork_ip_ranges_to_nat = "ALL_SUBNETWORKS_ALL_IP_RANGES"

  log_config {
    enable = true
    filter = "ERRORS_ONLY"
  }
}

resource "google_compute_firewall" "clients" {
  name        = "${var.name}-nats-clients"
  description = "Learners, aggregators and the watch, and nobody else, reach NATS."
  network     = google_compute_network.this.id
  direction   = "INGRESS"
  source_tags = [var.tags.learner, var.tags.aggregator, var.tags.keeper]
  target_tags = [var.tags.nats]

  allow {
    protocol = "tcp"
    ports    = ["4222"]
  }

  log_config {
    metadata = "INCLUDE_ALL_METADATA"
  }
}

resource "google_compute_firewall" "routes" {
  name        = "${var.name}-nats-routes"
  description = "NATS servers reach each other."
  network     = google_compute_network.this.id
  direction   = "INGRESS"
  source_tags = [var.tags.nats]
  target_tags = [var.tags.nats]

  allow {
    protocol = "tcp"
    ports    = ["6222"]
  }
}

resource "google_compute_firewall" "caches" {
  count       = var.cache_port == null ? 0 : 1
  name        = "${var.name}-caches"
  description = "Learners, and nobody else, read through the caches."
  network     = google_compute_network.this.id
  direction   = "INGRESS"
  source_tags = [var.tags.learner]
  target_tags = [var.tags.cache]

  allow {
    protocol = "tcp"
    ports    = [tostring(coalesce(var.cache_port, 0))]
  }
}

resource "google_compute_firewall" "ssh" {
  name          = "${var.name}-ssh-by-iap"
  description   = "People come in by IAP, which asks who they are."
  network       = google_compute_network.this.id
  direction     = "INGRESS"
  source_ranges = local.iap_ranges
  target_tags   = values(var.tags)

  allow {
    protocol = "tcp"
    ports    = ["22"]
  }

  log_config {
    metadata = "INCLUDE_ALL_METADATA"
  }
}

resource "google_compute_firewall" "health" {
  name          = "${var.name}-health"
  description   = "Google's health checks ask learners' machines for /livez."
  network       = google_compute_network.this.id
  direction     = "INGRESS"
  source_ranges = local.probe_ranges
  target_tags   = [var.tags.learner]

  allow {
    protocol = "tcp"
    ports    = [tostring(var.livez_port)]
  }
}

resource "google_compute_firewall" "metrics" {
  count         = length(var.monitoring_ranges) > 0 ? 1 : 0
  name          = "${var.name}-metrics"
  description   = "Prometheus, from private addresses."
  network       = google_compute_network.this.id
  direction     = "INGRESS"
  source_ranges = var.monitoring_ranges
  target_tags   = [var.tags.learner, var.tags.aggregator]

  allow {
    protocol = "tcp"
    ports    = [tostring(var.metrics_port)]
  }
}
