// Command etcd is etcd's own server: its module has the program as a function, and this is the main around it.
package main

import (
	"os"

	"go.etcd.io/etcd/server/v3/etcdmain"
)

func main() { etcdmain.Main(os.Args) }
