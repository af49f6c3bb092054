variable "project" {
  description = "Google Cloud project."
  type        = string
}

variable "run" {
  description = "Name of the run."
  type        = string
}

variable "name" {
  description = "Name of the learner, or of the site."
  type        = string
}

variable "site" {
  description = "Whether it is a site, whose learners share it."
  type        = bool
}

variable "warm_start" {
  description = "Whether it may read the checkpoints of all learners."
  type        = bool
}

variable "bucket" {
  description = "Bucket of the run's objects."
  type        = string
}

variable "data" {
  description = "Prepared data that it may read, gs://BUCKET/FOLDER; null for none."
  type        = string
}

variable "configuration" {
  description = "Bucket of releases and configuration."
  type        = string
}

variable "deleter_role" {
  description = "Role that holds storage.objects.delete alone."
  type        = string
}
