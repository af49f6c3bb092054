# The keeper of the groups of learners, and a watch of the run: a small machine, whose account may look at
# this run's groups and machines, resize the groups, read the run's objects, and nothing else.
# infra/keeper.py says what the keeper does, docs/watch.md what the watch does.

locals {
  full_name = "diloco-${var.run}-keeper"
  prefix    = "diloco-${var.run}-"
  objects   = "projects/_/buckets/${var.bucket}/objects/"
  listed    = "api.getAttribute('storage.googleapis.com/objectListPrefix', '')"
  parameters = merge(var.boot, {
    role  = "keeper"
    name  = "keeper"
    files = var.files
    secrets = merge(
      { "/etc/diloco/credentials/watch.toml" = module.credentials.version },
      { for webhook in module.webhook : "/etc/diloco/watch.env" => webhook.version },
    )
    environment = {}
    units       = ["diloco-watch.service"]
    groups      = var.groups
    stop_at     = var.stop_at
    budget      = var.budget
  })
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

# The watch reads what the run has stored, and stores nothing.
resource "google_storage_bucket_iam_member" "read" {
  bucket = var.bucket
  role   = "roles/storage.objectViewer"
  member = google_service_account.this.member

  condition {
    title      = "read and list the run"
    expression = "resource.name.startsWith('${local.objects}${var.run}/') || ${local.listed}.startsWith('${var.run}/')"
  }
}

resource "google_storage_bucket_iam_member" "configuration" {
  bucket = var.boot.bucket
  role   = "roles/storage.objectViewer"
  member = google_service_account.this.member

  condition {
    title      = "read the release and the run's configuration"
    expression = "resource.name.startsWith('projects/_/buckets/${var.boot.bucket}/objects/common/')"
  }
}

module "credentials" {
  source  = "../secret"
  project = var.project
  id      = "${local.full_name}-credentials"
  file    = "${var.auth_folder}/credentials/watch.toml"
  reader  = google_service_account.this.member
  labels  = var.labels
}

module "webhook" {
  source  = "../secret"
  project = var.project
  count   = var.webhook_file == null ? 0 : 1
  id      = "${local.full_name}-webhook"
  file    = var.webhook_file
  reader  = google_service_account.this.member
  labels  = var.labels
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
  machine_type              = "e2-medium" # for the watch, whose examination reads the tape into memory
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

  depends_on = [google_storage_bucket_iam_member.read, google_storage_bucket_iam_member.configuration]
}
