# Whom machines of learners are to Google Cloud: those of one learner, or of all learners of a site, whose
# names begin with the site's and a hyphen. What it may do follows from the prefix of their objects.

locals {
  # Object names are those of common/protocol/names.py.
  who      = "${var.site ? "site" : "learner"} ${var.name}"
  objects  = "projects/_/buckets/${var.bucket}/objects/"
  own      = "${var.run}/learner/${var.name}${var.site ? "-" : "/"}"
  all      = "${var.run}/learner/"
  listed   = var.warm_start ? local.all : local.own
  readable = ["${var.run}/global/", local.listed]
  metadata = "api.getAttribute('storage.googleapis.com/objectListPrefix', '')"
  may_read = join(" || ", [for prefix in local.readable : "resource.name.startsWith('${local.objects}${prefix}')"])
  may_list = "${local.metadata}.startsWith('${local.listed}')"
}

resource "google_service_account" "this" {
  account_id   = "learner-${substr(sha1("${var.run}/${var.name}"), 0, 12)}"
  display_name = "${local.who} of run ${var.run}"
}

# What it uploads: created below its own prefix, and never overwritten, which would need the right to
# delete.
resource "google_storage_bucket_iam_member" "create" {
  bucket = var.bucket
  role   = "roles/storage.objectCreator"
  member = google_service_account.this.member

  condition {
    title       = "create below its own prefix"
    expression  = "resource.name.startsWith('${local.objects}${local.own}')"
    description = local.who
  }
}

# What it reads: the run's versions, and its own objects, to compare what is there already.
resource "google_storage_bucket_iam_member" "read" {
  bucket = var.bucket
  role   = "roles/storage.objectViewer"
  member = google_service_account.this.member

  condition {
    title       = "read the versions, read and list its own"
    expression  = "${local.may_read} || ${local.may_list}"
    description = local.who
  }
}

# Its own older checkpoints, and no update.
resource "google_storage_bucket_iam_member" "tidy" {
  bucket = var.bucket
  role   = var.deleter_role
  member = google_service_account.this.member

  condition {
    title       = "delete its own checkpoints"
    expression  = var.site ? "resource.name.startsWith('${local.objects}${local.own}') && resource.name.extract('${local.objects}${local.own}{learner}/checkpoint/') != ''" : "resource.name.startsWith('${local.objects}${local.own}checkpoint/')"
    description = local.who
  }
}

resource "google_storage_bucket_iam_member" "configuration" {
  bucket = var.configuration
  role   = "roles/storage.objectViewer"
  member = google_service_account.this.member

  condition {
    title      = "read the release and the run's configuration"
    expression = "resource.name.startsWith('projects/_/buckets/${var.configuration}/objects/common/')"
  }
}

# The data that it trains on, in a bucket of the operator's.
resource "google_storage_bucket_iam_member" "data" {
  count  = var.data == null ? 0 : 1
  bucket = split("/", var.data)[2]
  role   = "roles/storage.objectViewer"
  member = google_service_account.this.member

  condition {
    title       = "read the run's data"
    expression  = "resource.name.startsWith('projects/_/buckets/${split("/", var.data)[2]}/objects/${join("/", slice(split("/", var.data), 3, length(split("/", var.data))))}/')"
    description = local.who
  }
}

resource "google_project_iam_member" "logs" {
  project = var.project
  role    = "roles/logging.logWriter"
  member  = google_service_account.this.member
}
