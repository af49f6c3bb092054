variable "project" {
  description = "Google Cloud project."
  type        = string
}

variable "run" {
  description = "Name of the run."
  type        = string
}

variable "name" {
  description = "Name of the learner."
  type        = string
}

variable "zones" {
  description = "Zone of each of its slices, of one region."
  type        = list(string)
}

variable "kind" {
  description = "v5p, v6e, tpu7x or cpu."
  type        = string
}

variable "chips" {
  description = "Chips of a slice of one host."
  type        = number
  default     = null
}

variable "topology" {
  description = "Topology of a slice of several hosts."
  type        = string
  default     = null
}

variable "machine_type" {
  description = "Machine type of kind cpu."
  type        = string
  default     = null
}

variable "spot" {
  description = "Whether it may be preempted."
  type        = bool
}

variable "reservation" {
  description = "Name of the reservation that its machines are of."
  type        = string
  default     = null
}

variable "image" {
  description = "Image of the boot disk."
  type        = string
}

variable "disk_gib" {
  description = "Size of the boot disk, GiB."
  type        = number
}

variable "auth_folder" {
  description = "Folder of diloco auth."
  type        = string
}

variable "identity" {
  description = "The account of its machines."
  type        = object({ name = string, email = string, member = string })
}

variable "network" {
  description = "The network."
  type        = string
}

variable "subnetwork" {
  description = "The subnet of its region."
  type        = string
}

variable "tag" {
  description = "Network tag of learners."
  type        = string
}

variable "paused" {
  description = "Whether it has no machines for now."
  type        = bool
}

variable "supervisor_port" {
  description = "Port at which the supervisors of several slices find each other."
  type        = number
}

variable "names_role" {
  description = "Role that changes records of a DNS zone, for several slices; null: no learner has several."
  type        = string
}

variable "livez_port" {
  description = "Port of /livez, which infra/boot.py answers."
  type        = number
}

variable "flex_start_hours" {
  description = "Hours for which Google gives machines when it has some (flex-start); null for another way."
  type        = number
}

variable "cache" {
  description = "URL of the cache through which it reads versions; null: none."
  type        = string
}

variable "data" {
  description = "Prepared data that each machine copies before its learner starts; null for none."
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
