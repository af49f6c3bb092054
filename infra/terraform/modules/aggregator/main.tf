# One aggregator, on a machine that Google restarts where it is. It keeps nothing there that matters:
# a new one recovers from the tape and the bucket. The others stand by meanwhile.

locals {
  full_name   = "diloco-${var.run}-${var.name}"
  checkpoints = var.chores && var.checkpoints
  objects     = "projects/_/buckets/${var.bucket}/objects/"
  created     = ["global/", "checkpoint/"]
  listed      = "api.getAttribute('storage.googleapis.com/objectListPrefix', '')"
  parameters = merge(var.boot, {
    role  = "aggregator"
    name  = var.name
    files = var.files
    secrets = merge(
      { "/etc/diloco/credentials/aggregator.toml" = module.credentials.version },
      { for operator in module.operator : "/etc/diloco/credentials/operator.toml" => operator.version },
    )
    units = concat(
      ["diloco-aggregator.service"],
      var.chores ? ["diloco-gc.timer"] : [],
      local.checkpoints ? ["diloco-checkpoint.timer"] : [],
    )
    environment = { DILOCO_AGGREGATOR_NAME = var.name }
  })
}

resource "google_service_account" "this" {
  account_id   = "aggregator-${substr(sha1("${var.run}/${var.name}"), 0, 12)}"
  display_name = "aggregator ${var.name} of run ${var.run}"
}

# Versions, and nothing that learners or operators make.
resource "google_storage_bucket_iam_member" "create" {
  bucket = var.bucket
  role   = "roles/storage.objectCreator"
  member = google_service_account.this.member

  condition {
    title      = "create versions and checkpoints"
    expression = join(" || ", [for prefix in local.created : "resource.name.startsWith('${local.objects}${var.run}/${prefix}')"])
  }
}

resource "google_storage_bucket_iam_member" "read" {
  bucket = var.bucket
  role   = "roles/storage.objectViewer"
  member = google_service_account.this.member

  condition {
    title      = "read and list the run"
    expression = "resource.name.startsWith('${local.objects}${var.run}/') || ${local.listed}.startsWith('${var.run}/')"
  }
}

resource "google_storage_bucket_iam_member" "collect" {
  bucket = var.bucket
  role   = var.deleter_role
  member = google_service_account.this.member

  condition {
    title      = "collect garbage of the run"
    expression = "resource.name.startsWith('${local.objects}${var.run}/')"
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

resource "google_project_iam_member" "logs" {
  project = var.project
  role    = "roles/logging.logWriter"
  member  = google_service_account.this.member
}

module "credentials" {
  source  = "../secret"
  project = var.project
  id      = "${local.full_name}-credentials"
  file    = "${var.auth_folder}/credentials/${var.name}.toml"
  reader  = google_service_account.this.member
  labels  = var.labels
}

# The timer's command is the operator's.
module "operator" {
  source  = "../secret"
  project = var.project
  count   = local.checkpoints ? 1 : 0
  id      = "${local.full_name}-operator"
  file    = "${var.auth_folder}/credentials/operator.toml"
  reader  = google_service_account.this.member
  labels  = var.labels
}

resource "google_compute_instance" "this" {
  #checkov:skip=CKV_GCP_38:Google encrypts the disk with keys of its own; a key brought along is lost with whoever holds it, and the disk has nothing that matters.
  name         = local.full_name
  zone         = var.zone
  machine_type = var.machine_type
  labels       = var.labels
  tags         = [var.tag]
  # For another machine type.
  allow_stopping_for_update = true

  boot_disk {
    initialize_params {
      image = var.image
      size  = var.disk_gib
      type  = "pd-balanced"
    }
  }

  network_interface {
    subnetwork = var.subnetwork
    nic_type   = "GVNIC"
  }

  # No secret stands here: whoever may look at the machine can read it, and so can all its processes.
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

  depends_on = [
    google_storage_bucket_iam_member.create, google_storage_bucket_iam_member.read,
    google_storage_bucket_iam_member.collect, google_storage_bucket_iam_member.configuration,
  ]
}
