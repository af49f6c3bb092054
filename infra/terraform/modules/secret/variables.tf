variable "id" {
  description = "Name of the secret."
  type        = string
}

variable "file" {
  description = "Path of the file that holds it."
  type        = string
}

variable "reader" {
  description = "IAM member that may read it."
  type        = string
}

variable "labels" {
  description = "Labels of the secret."
  type        = map(string)
}

variable "project" {
  description = "Project of the secret."
  type        = string
}
