# Three NATS servers in three zones, each with a fixed address and a disk of its own. Their
# configuration is what diloco auth has made from infra/nats/cluster.conf.

locals {
  servers = {
    for index, zone in var.zones : "nats-${index + 1}" => {
      zone       = zone
      region     = regex("^(.*)-(?:ai[0-9])?[a-z]$", zone)[0]
      address    = var.addresses[index]
      configured = file("${var.auth_folder}/nats-${index + 1}.conf")
    }
  }
  parameters = {
    for name, server in local.servers : name => merge(var.boot, {
      role = "nats"
      name = name
      files = {
        "/etc/nats/nats.conf"       = google_storage_bucket_object.configuration[name].name
        "/etc/nats/accounts.conf"   = google_storage_bucket_object.accounts.name
        "/etc/nats/tls/${name}.pem" = google_storage_bucket_object.certificate[name].name
        "/etc/nats/tls/ca.pem"      = var.authority
      }
      secrets     = { "/etc/nats/tls/${name}.key" = module.key[name].version }
      units       = ["nats-server.service"]
      environment = {}
      # The disk holds the streams and nothing else, so that no snapshot of it has the server's key.
      disk = { device = "/dev/disk/by-id/google-streams", folder = "/var/lib/nats/jetstream" }
    })
  }
}

resource "google_service_account" "this" {
  for_each     = local.servers
  account_id   = "nats-${substr(sha1("${var.run}/${each.key}"), 0, 12)}"
  display_name = "${each.key} of run ${var.run}"
}

resource "google_storage_bucket_iam_member" "configuration" {
  for_each = local.servers
  bucket   = var.boot.bucket
  role     = "roles/storage.objectViewer"
  member   = google_service_account.this[each.key].member

  condition {
    title      = "read the release and the servers' configuration"
    expression = "resource.name.startsWith('projects/_/buckets/${var.boot.bucket}/objects/common/') || resource.name.startsWith('projects/_/buckets/${var.boot.bucket}/objects/nats/')"
  }
}

resource "google_project_iam_member" "logs" {
  for_each = local.servers
  project  = var.project
  role     = "roles/logging.logWriter"
  member   = google_service_account.this[each.key].member
}

module "key" {
  source   = "../secret"
  project  = var.project
  for_each = local.servers
  id       = "diloco-${var.run}-${each.key}-key"
  file     = "${var.auth_folder}/tls/${each.key}.key"
  reader   = google_service_account.this[each.key].member
  labels   = var.labels
}

# Public keys and permissions; it changes with each identity.
resource "google_storage_bucket_object" "accounts" {
  name    = "nats/accounts.conf"
  bucket  = var.boot.bucket
  content = file("${var.auth_folder}/accounts.conf")
}

resource "google_storage_bucket_object" "certificate" {
  for_each = local.servers
  name     = "nats/${each.key}.pem"
  bucket   = var.boot.bucket
  content  = file("${var.auth_folder}/tls/${each.key}.pem")
}

resource "google_storage_bucket_object" "configuration" {
  for_each = local.servers
  name     = "nats/${each.key}.conf"
  bucket   = var.boot.bucket
  content  = each.value.configured
}

resource "google_compute_address" "this" {
  for_each     = local.servers
  name         = "diloco-${var.run}-${each.key}"
  region       = each.value.region
  subnetwork   = var.subnetworks[each.value.region]
  address_type = "INTERNAL"
  address      = each.value.address
}

resource "google_compute_disk" "streams" {
  #checkov:skip=CKV_GCP_37:Google encrypts the disk with keys of its own; a key brought along can be lost, and the tape with it.
  for_each = local.servers
  name     = "diloco-${var.run}-${each.key}-streams"
  zone     = each.value.zone
  type     = "pd-ssd"
  size     = var.disk_gib
  labels   = var.labels

  lifecycle {
    prevent_destroy = true
  }
}

resource "google_compute_resource_policy" "snapshots" {
  for_each = toset(values(local.servers)[*].region)
  name     = "diloco-${var.run}-streams"
  region   = each.key

  snapshot_schedule_policy {
    schedule {
      hourly_schedule {
        hours_in_cycle = 4
        start_time     = "00:00"
      }
    }
    retention_policy {
      max_retention_days    = var.snapshot_days
      on_source_disk_delete = "KEEP_AUTO_SNAPSHOTS"
    }
  }
}

resource "google_compute_disk_resource_policy_attachment" "snapshots" {
  for_each = local.servers
  name     = google_compute_resource_policy.snapshots[each.value.region].name
  disk     = google_compute_disk.streams[each.key].name
  zone     = each.value.zone
}

resource "google_compute_instance" "this" {
  #checkov:skip=CKV_GCP_38:Google encrypts the disks with keys of its own; a key brought along can be lost, and the tape with it.
  for_each            = local.servers
  name                = "diloco-${var.run}-${each.key}"
  zone                = each.value.zone
  machine_type        = var.machine_type
  labels              = var.labels
  tags                = [var.tag]
  deletion_protection = true
  # For another machine type: one server after the other, docs/provision.md.
  allow_stopping_for_update = true

  boot_disk {
    initialize_params {
      image = var.image
      size  = 20
      type  = "pd-balanced"
    }
  }

  attached_disk {
    source      = google_compute_disk.streams[each.key].self_link
    device_name = "streams"
  }

  network_interface {
    subnetwork = var.subnetworks[each.value.region]
    network_ip = google_compute_address.this[each.key].address
  }

  # No secret stands here: whoever may look at the machine can read it, and so can all its processes.
  metadata = {
    startup-script         = var.startup_script
    diloco                 = jsonencode(local.parameters[each.key])
    enable-oslogin         = "TRUE"
    block-project-ssh-keys = "TRUE"
    serial-port-enable     = "FALSE"
  }

  scheduling {
    automatic_restart   = true
    on_host_maintenance = "MIGRATE"
  }

  service_account {
    email  = google_service_account.this[each.key].email
    scopes = ["cloud-platform"]
  }

  shielded_instance_config {
    enable_secure_boot          = true
    enable_vtpm                 = true
    enable_integrity_monitoring = true
  }

  depends_on = [google_storage_bucket_iam_member.configuration]
}
