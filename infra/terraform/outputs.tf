output "nats_addresses" {
  description = "What diloco auth init is told with --host."
  value       = local.nats_addresses
}

output "store_url" {
  description = "Where the run's objects are."
  value       = local.store_url
}

output "operator_environment" {
  description = "For the operator's shell, while a tunnel to a NATS server is open: docs/provision.md."
  value = {
    DILOCO_BUS_URL         = "tls://127.0.0.1:4222"
    DILOCO_BUS_TLS_CA      = abspath("${var.auth_folder}/tls/ca.pem")
    DILOCO_BUS_CREDENTIALS = abspath("${var.auth_folder}/credentials/operator.toml")
  }
}

output "run_toml" {
  description = "The run's file, as all machines have it."
  value       = local.run_toml
}

output "prometheus" {
  description = "Configuration of a Prometheus that finds the machines by their tags, those that were recreated too: docs/metrics.md."
  value = yamlencode(merge(yamldecode(file("${path.module}/../prometheus/prometheus.yml")), {
    scrape_configs = [
      for role, zones in {
        aggregator = values(local.aggregators)[*].zone
        learner    = flatten(values(local.learners)[*].zones)
        } : {
        job_name       = "diloco-${role}s"
        gce_sd_configs = [for zone in sort(distinct(zones)) : { project = var.project, zone = zone, port = var.metrics_port }]
        relabel_configs = [
          { source_labels = ["__meta_gce_tags"], regex = ".*,${local.tags[role]},.*", action = "keep" },
          { source_labels = ["__meta_gce_instance_name"], target_label = "instance" },
        ]
      }
    ]
  }))
}

output "machines" {
  description = "Where each part is: an instance, or the group of a learner's machines; of several slices one each."
  value = merge(
    { for name, instance in module.nats.instances : name => { zone = instance.zone, instance = instance.name } },
    { for name, aggregator in module.aggregator : name => { zone = aggregator.instance.zone, instance = aggregator.instance.name } },
    merge([for name, learner in module.learner : {
      for index, group in learner.groups : length(learner.groups) == 1 ? name : "${name}/${index}" => { zone = group.zone, group = group.name }
    }]...),
  )
}
