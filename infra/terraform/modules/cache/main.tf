# A read-through cache of the run's versions for the learners of a region: nginx on a small machine, whose
# account may read what every learner of the run may read, and nothing else. docs/adr/0091 says why.

locals {
  full_name = "diloco-${var.run}-cache-${var.region}"
  objects   = "projects/_/buckets/${var.bucket}/objects/"
  parameters = {
    role        = "cache"
    name        = "cache-${var.region}"
    bucket      = var.configuration
    kind        = "cpu"
    release     = {}
    files       = { "/etc/diloco/cache.conf" = google_storage_bucket_object.nginx.name }
    secrets     = {}
    environment = {}
    units       = []
  }
}

# Of its disk the system has 10 GiB, and a fifth stays free.
resource "google_storage_bucket_object" "nginx" {
  name   = "common/cache-${var.region}.conf"
  bucket = var.configuration
  content = templatefile("${path.module}/nginx.conf.tftpl", {
    user     = "www-data"
    folder   = "/var/cache/diloco-cache"
    max_size = "${floor((var.disk_gib - 10) * 0.8)}g"
    listen   = tostring(var.port)
    prefix   = var.run
    origin   = "https://storage.googleapis.com"
    bucket   = var.bucket
    token    = "/run/diloco-cache/token.conf"
  })
}

resource "google_service_account" "this" {
  account_id   = "cache-${substr(sha1("${var.run}/${var.region}"), 0, 12)}"
  display_name = "cache in ${var.region} of run ${var.run}"
}

resource "google_storage_bucket_iam_member" "read" {
  bucket = var.bucket
  role   = "roles/storage.objectViewer"
  member = google_service_account.this.member

  condition {
    title       = "read the versions"
    expression  = "resource.name.startsWith('${local.objects}${var.run}/global/')"
    description = "cache in ${var.region}"
  }
}

resource "google_storage_bucket_iam_member" "configuration" {
  bucket = var.configuration
  role   = "roles/storage.objectViewer"
  member = google_service_account.this.member

  condition {
    title      = "read the run's configuration"
    expression = "resource.name.startsWith('projects/_/buckets/${var.configuration}/objects/common/')"
  }
}

resource "google_project_iam_member" "logs" {
  project = var.project
  role    = "roles/logging.logWriter"
  member  = google_service_account.this.member
}

# Reserved, as learners of the same range take any address that is free.
resource "google_compute_address" "this" {
  name         = local.full_name
  region       = var.region
  subnetwork   = var.subnetwork
  address_type = "INTERNAL"
  address      = var.address
}

resource "google_compute_instance" "this" {
  #checkov:skip=CKV_GCP_38:Google encrypts the disk with keys of its own; what is on it is in the bucket too.
  name                      = local.full_name
  zone                      = var.zone
  machine_type              = "e2-standard-2"
  labels                    = var.labels
  tags                      = [var.tag]
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
    network_ip = google_compute_address.this.address
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
