# One secret, read from a file, which one service account may read. The value is a write-only
# argument: it goes to Secret Manager, and stands neither in the plan nor in the state.

resource "google_secret_manager_secret" "this" {
  secret_id = var.id
  labels    = var.labels

  replication {
    auto {}
  }
}

resource "google_secret_manager_secret_version" "this" {
  secret         = google_secret_manager_secret.this.id
  secret_data_wo = file(var.file)
  # 28 bits of its digest tell that the file has changed, and nothing about it.
  secret_data_wo_version = parseint(substr(filesha256(var.file), 0, 7), 16)

  lifecycle {
    # Machines read the newest version: there is always one.
    create_before_destroy = true
  }
}

resource "google_secret_manager_secret_iam_member" "reader" {
  secret_id = google_secret_manager_secret.this.id
  role      = "roles/secretmanager.secretAccessor"
  member    = var.reader
}
