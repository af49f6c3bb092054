# A private bucket. Nothing is ever overwritten in it, and what may go is known to garbage collection
# alone; age is a backstop for what that has missed, and only where age says something.

resource "google_storage_bucket" "this" {
  #checkov:skip=CKV_GCP_78:Objects are created once and never overwritten; versions would only keep, and bill, what garbage collection has removed.
  #checkov:skip=CKV_GCP_62:Cloud Audit Logs hold who changes the bucket; access logs would be a line for every shard of every update.
  name                        = var.name
  location                    = upper(var.location)
  labels                      = var.labels
  storage_class               = "STANDARD"
  uniform_bucket_level_access = true
  public_access_prevention    = "enforced"
  force_destroy               = false

  soft_delete_policy {
    retention_duration_seconds = var.soft_delete_days * 24 * 3600
  }

  dynamic "lifecycle_rule" {
    # A rule without a prefix would be one for every object.
    for_each = { for name, rule in var.backstops : name => rule if length(rule.prefixes) > 0 }
    content {
      action {
        type = "Delete"
      }
      condition {
        age            = lifecycle_rule.value.days
        matches_prefix = lifecycle_rule.value.prefixes
      }
    }
  }

  lifecycle_rule {
    action {
      type = "AbortIncompleteMultipartUpload"
    }
    condition {
      age = 7
    }
  }

  lifecycle {
    prevent_destroy = true
  }
}
