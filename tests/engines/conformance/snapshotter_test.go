// Package conformance runs containerd's own suite of what a snapshotter must do, by a containerd, as its clients do.
// tests/engines/newer.py compiles it among containerd's sources.
package conformance

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"

	snapshotsapi "github.com/containerd/containerd/api/services/snapshots/v1"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/core/snapshots/proxy"
	"github.com/containerd/containerd/v2/core/snapshots/testsuite"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

// The suite gives the same keys to the snapshotters of several tests, as each is expected to be a new one: here each
// test has a namespace of its own.
func inNamespace(namespace string) []grpc.DialOption {
	unary := func(ctx context.Context, method string, request, reply any, connection *grpc.ClientConn,
		invoke grpc.UnaryInvoker, options ...grpc.CallOption) error {
		return invoke(namespaces.WithNamespace(ctx, namespace), method, request, reply, connection, options...)
	}
	stream := func(ctx context.Context, description *grpc.StreamDesc, connection *grpc.ClientConn, method string,
		begin grpc.Streamer, options ...grpc.CallOption) (grpc.ClientStream, error) {
		return begin(namespaces.WithNamespace(ctx, namespace), description, connection, method, options...)
	}
	return []grpc.DialOption{grpc.WithUnaryInterceptor(unary), grpc.WithStreamInterceptor(stream)}
}

// Removes all snapshots of a test, each before those that it is made of.
func removeAll(ctx context.Context, snapshotter snapshots.Snapshotter) error {
	for {
		var left []string
		isParent := map[string]bool{}
		err := snapshotter.Walk(ctx, func(_ context.Context, info snapshots.Info) error {
			left = append(left, info.Name)
			isParent[info.Parent] = true
			return nil
		})
		if err != nil || len(left) == 0 {
			return err
		}
		for _, name := range left {
			if !isParent[name] {
				err = errors.Join(err, snapshotter.Remove(ctx, name))
			}
		}
		if err != nil {
			return err
		}
	}
}

func TestSnapshotter(t *testing.T) {
	socket, name := os.Getenv("CONTAINERD_SOCKET"), os.Getenv("CONTAINERD_SNAPSHOTTER")
	if socket == "" || name == "" {
		t.Fatal("CONTAINERD_SOCKET and CONTAINERD_SNAPSHOTTER must say which snapshotter of which containerd")
	}
	testsuite.SnapshotterSuite(t, name, func(ctx context.Context, root string) (snapshots.Snapshotter, func() error, error) {
		options := append(inNamespace(filepath.Base(filepath.Dir(root))),
			grpc.WithTransportCredentials(insecure.NewCredentials()))
		connection, err := grpc.NewClient("unix://"+socket, options...)
		if err != nil {
			return nil, nil, err
		}
		snapshotter := proxy.NewSnapshotter(snapshotsapi.NewSnapshotsClient(connection), name)
		end := func() error {
			return errors.Join(removeAll(context.WithoutCancel(ctx), snapshotter), connection.Close())
		}
		return snapshotter, end, nil
	})
}
