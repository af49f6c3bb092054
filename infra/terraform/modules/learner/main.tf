# One learner: for each of its slices, mostly one, a group of machines. The group has as many machines as the
# slice has hosts, mostly one. Google makes one machine anew that was preempted, has failed, or is not healthy; the
# hosts of a slice of several come all at once or not at all, and the keeper makes them anew. A lost slice
# comes back alone: its group is of no other.

locals {
  full_name = "diloco-${var.run}-${var.name}"
  region    = regex("^(.*)-(?:ai[0-9])?[a-z]$", var.zones[0])[0]

  # How a kind of accelerator comes: machines of one host, chips of each host of a larger slice, disks.
  kinds = {
    v5p   = { prefix = "ct5p-hightpu-", disk = "pd-balanced" }
    v6e   = { prefix = "ct6e-standard-", disk = "hyperdisk-balanced" }
    tpu7x = { prefix = "tpu7x-standard-", disk = "hyperdisk-balanced" }
  }
  chips_of_host = 4
  accelerator   = var.kind != "cpu"
  sides         = [for side in split("x", coalesce(var.topology, "1")) : tonumber(side)]
  slice_chips   = local.sides[0] * try(local.sides[1], 1) * try(local.sides[2], 1)
  hosts         = var.topology == null ? 1 : local.slice_chips / local.chips_of_host
  chips         = var.topology == null ? var.chips : local.chips_of_host
  machine_type  = local.accelerator ? "${local.kinds[var.kind].prefix}${local.chips}t" : var.machine_type
  flex_start    = var.flex_start_hours != null
  # docs.cloud.google.com/tpu/docs/consume-reservation-compute; plain machines are as on demand.
  bound = local.accelerator && var.reservation != null
  # Whoever makes machines anew: a group in bulk mode grows from nothing only.
  bulk      = local.hosts > 1 || local.flex_start
  disk_type = local.accelerator ? local.kinds[var.kind].disk : "pd-balanced"

  # The supervisors of several slices find each other by names, which stay when a machine is replaced: each
  # machine gives its name its own address when it boots.
  slices  = length(var.zones)
  several = local.slices > 1
  domain  = "${var.name}.${var.run}.diloco.internal"
  peers   = [for host in range(local.slices * local.hosts) : "s${floor(host / local.hosts)}-h${host % local.hosts}.${local.domain}"]
  groups  = local.several ? [for slice in range(local.slices) : "${local.full_name}-s${slice}"] : [local.full_name]

  parameters = [for slice in range(local.slices) : merge(var.boot, var.data == null ? {} : { data = var.data }, local.several ? {
    slice = { number = slice, hosts = local.hosts, names = "projects/${var.project}/managedZones/${local.full_name}" }
    } : {}, {
    role    = "learner"
    name    = var.name
    files   = var.files
    secrets = { "/etc/diloco/credentials/${var.name}.toml" = module.credentials.version }
    units   = ["diloco-learner@${var.name}.service"]
    environment = merge(
      # A machine that comes back after a preemption has an empty disk.
      { DILOCO_LEARNER_CHECKPOINT_UPLOAD = "true" },
      # All hosts are told the same: who is which, and where host 0 is, stands in what Google's metadata
      # say of a slice, and JAX reads it there.
      local.hosts == 1 || local.several ? {} : { DILOCO_LEARNER_COORDINATOR = "auto" },
      local.several ? {
        DILOCO_LEARNER_SLICES = tostring(local.slices)
        DILOCO_LEARNER_PEERS  = join(",", [for peer in local.peers : "${peer}:${var.supervisor_port}"])
      } : {},
      var.cache == null ? {} : { DILOCO_STORE_CACHE = var.cache },
    )
  })]
}

module "credentials" {
  source  = "../secret"
  project = var.project
  id      = "${local.full_name}-credentials"
  file    = "${var.auth_folder}/credentials/${var.name}.toml"
  reader  = var.identity.member
  labels  = var.labels
}

# The hosts of a learner speak to each other, and to nobody else's.
resource "google_compute_firewall" "slice" {
  count                   = local.hosts > 1 || local.several ? 1 : 0
  name                    = "${local.full_name}-slice"
  description             = "The hosts of one learner: JAX's coordinator and libtpu; host 0 listens to the others at a port of its system's choice; of several slices the supervisors."
  network                 = var.network
  direction               = "INGRESS"
  source_service_accounts = [var.identity.email]
  target_service_accounts = [var.identity.email]

  allow {
    protocol = "tcp"
    ports    = concat(["8470-8490", "32768-60999"], local.several ? ["8081", tostring(var.supervisor_port)] : [])
  }
}

# Resolved inside the network alone.
resource "google_dns_managed_zone" "peers" {
  #checkov:skip=CKV_GCP_16:DNSSEC is for public zones.
  count       = local.several ? 1 : 0
  name        = local.full_name
  dns_name    = "${local.domain}."
  description = "The hosts of learner ${var.name} of run ${var.run}, by slice."
  visibility  = "private"
  labels      = var.labels

  private_visibility_config {
    networks {
      network_url = var.network
    }
  }
}

# A name that is looked up before its machine has come must be there: resolvers remember for minutes that one is
# not. The address until then is of a range that nobody has.
resource "google_dns_record_set" "peer" {
  for_each     = toset(local.several ? local.peers : [])
  managed_zone = google_dns_managed_zone.peers[0].name
  name         = "${each.key}."
  type         = "A"
  ttl          = 5
  rrdatas      = ["192.0.2.1"]

  lifecycle {
    ignore_changes = [rrdatas]
  }
}

# To change these names, and no others.
resource "google_dns_managed_zone_iam_member" "peers" {
  count        = local.several ? 1 : 0
  managed_zone = google_dns_managed_zone.peers[0].name
  role         = var.names_role
  member       = var.identity.member
}

resource "google_compute_resource_policy" "slice" {
  count  = local.hosts > 1 ? local.slices : 0
  name   = local.groups[count.index]
  region = local.region

  workload_policy {
    type                 = "HIGH_THROUGHPUT"
    accelerator_topology = var.topology
  }
}

resource "google_compute_instance_template" "this" {
  count        = local.slices
  name_prefix  = "${local.full_name}-"
  machine_type = local.machine_type
  labels       = var.labels
  tags         = [var.tag]

  disk {
    source_image = var.image
    disk_type    = local.disk_type
    disk_size_gb = var.disk_gib
    boot         = true
    auto_delete  = true
  }

  network_interface {
    subnetwork = var.subnetwork
    nic_type   = "GVNIC"
  }

  # No secret stands here: whoever may look at the machine can read it, and so can all its processes.
  metadata = {
    startup-script          = var.startup_script
    diloco                  = jsonencode(local.parameters[count.index])
    enable-guest-attributes = "TRUE"
    enable-oslogin          = "TRUE"
    block-project-ssh-keys  = "TRUE"
    serial-port-enable      = "FALSE"
  }

  scheduling {
    provisioning_model          = var.spot ? "SPOT" : local.bound ? "RESERVATION_BOUND" : local.flex_start ? "FLEX_START" : "STANDARD"
    preemptible                 = var.spot
    automatic_restart           = !var.spot && !local.flex_start
    on_host_maintenance         = local.accelerator || var.spot ? "TERMINATE" : "MIGRATE"
    instance_termination_action = var.spot ? "STOP" : local.bound || local.flex_start ? "DELETE" : null

    dynamic "max_run_duration" {
      for_each = var.flex_start_hours[*]
      content {
        seconds = max_run_duration.value * 3600
      }
    }
  }

  dynamic "reservation_affinity" {
    for_each = var.flex_start_hours[*]
    content {
      type = "NO_RESERVATION"
    }
  }

  dynamic "reservation_affinity" {
    for_each = var.reservation[*]
    content {
      type = "SPECIFIC_RESERVATION"
      specific_reservation {
        key    = "compute.googleapis.com/reservation-name"
        values = [reservation_affinity.value]
      }
    }
  }

  service_account {
    email  = var.identity.email
    scopes = ["cloud-platform"]
  }

  shielded_instance_config {
    # The images for TPUs load drivers that secure boot would refuse.
    enable_secure_boot          = !local.accelerator
    enable_vtpm                 = true
    enable_integrity_monitoring = true
  }

  lifecycle {
    create_before_destroy = true
  }
}

resource "google_compute_health_check" "this" {
  count               = local.bulk ? 0 : 1
  name                = local.full_name
  description         = "Ten minutes without /livez: the machine itself is broken. Of its daemons systemd takes care."
  check_interval_sec  = 60
  timeout_sec         = 10
  unhealthy_threshold = 10

  http_health_check {
    port         = var.livez_port
    request_path = "/livez"
  }

  log_config {
    enable = true
  }
}

resource "google_compute_instance_group_manager" "this" {
  count              = local.slices
  name               = local.groups[count.index]
  zone               = var.zones[count.index]
  base_instance_name = local.groups[count.index]
  target_size        = var.paused ? 0 : local.hosts

  version {
    instance_template = google_compute_instance_template.this[count.index].self_link_unique
  }

  # All hosts of a slice are made at once, when there is capacity for all.
  dynamic "target_size_policy" {
    for_each = local.bulk ? ["BULK"] : []
    content {
      mode = target_size_policy.value
    }
  }

  # The hosts of a slice come and go together, so only a slice of one host is mended by its health.
  dynamic "auto_healing_policies" {
    for_each = google_compute_health_check.this[*].id
    content {
      health_check      = auto_healing_policies.value
      initial_delay_sec = 3600
    }
  }

  dynamic "resource_policies" {
    for_each = local.hosts > 1 ? [google_compute_resource_policy.slice[count.index].id] : []
    content {
      workload_policy = resource_policies.value
    }
  }

  instance_lifecycle_policy {
    default_action_on_failure = local.bulk ? "DO_NOTHING" : "REPAIR"
    # What comes back has the newest release and configuration.
    force_update_on_repair = "YES"
  }

  # A change of the template waits for the machine's next life; nothing that trains is stopped by an
  # apply. A slice of one host never has two machines at once.
  # Whoever updates the machines themselves refreshes them: a new release is metadata, for which no
  # machine is deleted.
  update_policy {
    type                           = "OPPORTUNISTIC"
    minimal_action                 = "REFRESH"
    most_disruptive_allowed_action = "REFRESH"
    replacement_method             = "RECREATE"
    max_surge_fixed                = 0
    max_unavailable_fixed          = local.hosts
  }

  # Capacity may come hours later, and the group goes on asking.
  wait_for_instances = false
}
