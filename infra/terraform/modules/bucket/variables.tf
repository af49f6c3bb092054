variable "name" {
  description = "Name of the bucket."
  type        = string
}

variable "location" {
  description = "A region, or US, EU or ASIA."
  type        = string
}

variable "soft_delete_days" {
  description = "Days for which deleted objects can be brought back, and are billed; 0 or 7 to 90."
  type        = number
}

variable "backstops" {
  description = "Prefixes whose objects are deleted at an age; at most 50 prefixes each."
  type        = map(object({ days = number, prefixes = list(string) }))
  default     = {}
}

variable "labels" {
  description = "Labels of the bucket."
  type        = map(string)
}
