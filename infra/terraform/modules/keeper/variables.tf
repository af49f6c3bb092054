variable "project" {
  description = "Google Cloud project."
  type        = string
}

variable "run" {
  description = "Name of the run."
  type        = string
}

variable "zone" {
  description = "Zone of its machine."
  type        = string
}

variable "image" {
  description = "Image of the boot disk."
  type        = string
}

variable "groups" {
  description = "The groups of learners, as Terraform wants them."
  type        = list(object({ project = string, zone = string, name = string, hosts = number, ours = bool }))
}

variable "stop_at" {
  description = "Time after which it takes all machines of learners; empty: never."
  type        = string
}

variable "subnetwork" {
  description = "The subnet of its region."
  type        = string
}

variable "tag" {
  description = "Network tag of the keeper."
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
