variable "project" {
  description = "Google Cloud project."
  type        = string
}

variable "run" {
  description = "Name of the run."
  type        = string
}

variable "name" {
  description = "Name of the aggregator."
  type        = string
}

variable "zone" {
  description = "Zone of its machine."
  type        = string
}

variable "machine_type" {
  description = "Machine type; memory for one accumulator and the outer state of each fragment."
  type        = string
}

variable "image" {
  description = "Image of the boot disk."
  type        = string
}

variable "disk_gib" {
  description = "Size of the boot disk, GiB."
  type        = number
}

variable "bucket" {
  description = "Bucket of the run's objects."
  type        = string
}

variable "deleter_role" {
  description = "Role that holds storage.objects.delete alone."
  type        = string
}

variable "auth_folder" {
  description = "Folder of diloco auth."
  type        = string
}

variable "chores" {
  description = "Whether its machine has the timers that one machine of a run needs."
  type        = bool
}

variable "checkpoints" {
  description = "Whether checkpoints are among them."
  type        = bool
}

variable "subnetwork" {
  description = "The subnet of its region."
  type        = string
}

variable "tag" {
  description = "Network tag of aggregators."
  type        = string
}

variable "startup_script" {
  description = "What a machine runs at each boot."
  type        = string
}

variable "boot" {
  description = "What the startup script is told on every machine; bucket is that of releases and configuration."
  type = object({
    bucket  = string
    kind    = string
    release = object({ object = string, sha256 = string })
  })
}

variable "files" {
  description = "Objects of that bucket by the paths that they are copied to."
  type        = map(string)
}

variable "labels" {
  description = "Labels of what takes some."
  type        = map(string)
}
