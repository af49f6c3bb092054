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
  type        = list(object({ project = string, zone = string, name = string, hosts = number, ours = bool, dollars_hour = number }))
}

variable "stop_at" {
  description = "Time after which it takes all machines of learners; empty: never."
  type        = string
}

variable "budget" {
  description = "Dollars after which it takes all machines of learners, and what it counts them by; null: none."
  type        = object({ dollars = number, dollars_hour = number, uncounted = list(string) })
}

variable "bucket" {
  description = "Bucket of the run's objects."
  type        = string
}

variable "auth_folder" {
  description = "Folder of diloco auth."
  type        = string
}

variable "webhook_file" {
  description = "File with the address of the webhook for alerts; null: none."
  type        = string
}

variable "boot" {
  description = "Bucket of the configuration, kind and release."
  type        = object({ bucket = string, kind = string, release = map(string) })
}

variable "files" {
  description = "Files of the machine: path there -> object of the bucket of configurations."
  type        = map(string)
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
