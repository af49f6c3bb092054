variable "project" {
  description = "Google Cloud project."
  type        = string
}

variable "run" {
  description = "Name of the run."
  type        = string
}

variable "zones" {
  description = "Zone of each server."
  type        = list(string)
}

variable "addresses" {
  description = "Address of each server."
  type        = list(string)
}

variable "authority" {
  description = "Object that holds the certificate of the run's authority."
  type        = string
}

variable "machine_type" {
  description = "Machine type."
  type        = string
}

variable "image" {
  description = "Image of the boot disk."
  type        = string
}

variable "disk_gib" {
  description = "Size of the disk of the streams, GiB."
  type        = number
}

variable "snapshot_days" {
  description = "Days for which snapshots of it are kept."
  type        = number
}

variable "auth_folder" {
  description = "Folder of diloco auth."
  type        = string
}

variable "subnetworks" {
  description = "Subnet by region."
  type        = map(string)
}

variable "tag" {
  description = "Network tag of NATS servers."
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

variable "labels" {
  description = "Labels of what takes some."
  type        = map(string)
}
