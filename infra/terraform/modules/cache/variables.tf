variable "project" {
  description = "Google Cloud project."
  type        = string
}

variable "run" {
  description = "Name of the run."
  type        = string
}

variable "region" {
  description = "Region of the learners that it serves."
  type        = string
}

variable "zone" {
  description = "Zone of its machine."
  type        = string
}

variable "address" {
  description = "Address of its machine in the subnet."
  type        = string
}

variable "port" {
  description = "Port at which learners ask it."
  type        = number
}

variable "image" {
  description = "Image of the boot disk."
  type        = string
}

variable "disk_gib" {
  description = "GiB of its disk."
  type        = number
}

variable "bucket" {
  description = "Bucket of the run's objects."
  type        = string
}

variable "configuration" {
  description = "Bucket of what machines are configured with."
  type        = string
}

variable "subnetwork" {
  description = "The subnet of its region."
  type        = string
}

variable "tag" {
  description = "Network tag of caches."
  type        = string
}

variable "startup_script" {
  description = "What a machine runs at each boot."
  type        = string
}

variable "labels" {
  description = "Labels of what takes some."
  type        = map(string)
}
