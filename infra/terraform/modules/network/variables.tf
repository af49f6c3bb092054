variable "name" {
  description = "Name of the network, and beginning of the names of what is in it."
  type        = string
}

variable "subnets" {
  description = "Address range by region."
  type        = map(string)
}

variable "tags" {
  description = "Network tags of the kinds of machines."
  type        = object({ nats = string, aggregator = string, learner = string, keeper = string, cache = string })
}

variable "metrics_port" {
  description = "Port of /metrics."
  type        = number
}

variable "livez_port" {
  description = "Port of /livez on learners' machines."
  type        = number
}

variable "cache_port" {
  description = "Port of the caches; null: there are none."
  type        = number
}

variable "monitoring_ranges" {
  description = "Private address ranges from which metrics may be read."
  type        = set(string)
}
