# The keeper of the groups of learners: a small machine, whose account may look at this run's groups and
# machines and resize the groups, and nothing else. infra/keeper.py says what it does.

locals {
  full_name = "diloco-${var.run}-keeper"
  prefix    = "diloco-${var.run}-"
  parameters = {
    role        = "keeper"
    name        = "keeper"
    bucket      = ""
    kind        = "cpu"
    release     = {}
    files       = {}
    secrets     = {}
    environment = {}
    units       = []
    groups      = var.groups
    stop_at     = var.stop_at
  }
}

resource "google_service_account" "this" {
  account_id   = "keeper-${substr(sha1(var.run), 0, 12)}"
  display_name = "keeper of run ${var.run}"
}

resource "google_project_iam_custom_role" "this" {
  role_id = "diloco_${replace(var.run, "-", "_")}_keeper"
  title   = "diloco ${var.run}: resize groups of learners"
  permissions = [
    "compute.instanceGroupManagers.get",
    "compute.instanceGroupManagers.update",
    "compute.instances.get",
    "compute.instances.getGuestAttributes",
  ]
}

resource "google_project_iam_member" "groups" {
  project = var.project
  role    = google_project_iam_custom_role.this.id
  member  = google_service_account.this.member

  condition {
    title       = "groups and machines of the run"
    description = "keeper of ${var.run}"
    expression = join(" || ", [
      "resource.name.extract('/instanceGroupManagers/{name}').startsWith('${local.prefix}')",
      "resource.name.extract('/instances/{name}').startsWith('${local.prefix}')",
    ])
  }
}

resource "google_project_iam_member" "logs" {
  project = var.project
  role    = "roles/logging.logWriter"
  member  = google_service_account.this.member
}

resource "google_compute_instance" "this" {
  #checkov:skip=CKV_GCP_38:Google encrypts the disk with keys of its own; there is nothing on it.
  name                      = local.full_name
  zone                      = var.zone
  machine_type              = "e2-micro"
  labels                    = var.labels
  tags                      = [var.tag]
  allow_stopping_for_update = true

  boot_disk {
    initialize_params {
      image = var.image
      size  = 20
      type  = "pd-balanced"
    }
  }

  network_interface {
    subnetwork = var.subnetwork
  }

  metadata = {
    startup-script         = var.startup_script
    diloco                 = jsonencode(local.parameters)
    enable-oslogin         = "TRUE"
    block-project-ssh-keys = "TRUE"
    serial-port-enable     = "FALSE"
  }

  scheduling {
    automatic_restart   = true
    on_host_maintenance = "MIGRATE"
  }

  service_account {
    email  = google_service_account.this.email
    scopes = ["cloud-platform"]
  }

  shielded_instance_config {
    enable_secure_boot          = true
    enable_vtpm                 = true
    enable_integrity_monitoring = true
  }
}
